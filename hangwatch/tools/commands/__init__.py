"""The commands of the tools. Each is named in the table of `hangwatch.cli`, and imported only to run it."""
