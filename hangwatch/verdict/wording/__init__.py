"""The text of a verdict. `render.render` makes it from the sentences in the other modules. Pure."""
