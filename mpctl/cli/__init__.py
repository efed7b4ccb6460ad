"""The commands: parse, call, render, exit code."""
