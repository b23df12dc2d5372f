"""Pure: the text of a verdict. `render.render` makes it; the other modules contain its sentences."""
