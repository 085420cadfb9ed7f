"""The command line: parse, call, print; one file per sub-command. Nothing imports it."""
