"""The commands: each parses its options, calls the other rooms, prints the result, sets the exit
code."""
