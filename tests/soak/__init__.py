"""Long runs of `make long PART=soak`."""

import argparse


def number_options(doc: str | None, **defaults: float) -> argparse.Namespace:
    """Read the options of a command: numbers, each with its default. `doc` is the docstring of the command."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()
