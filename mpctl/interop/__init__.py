"""Jobs as flags, files or snippets of other software, and jobs read from its flags."""
