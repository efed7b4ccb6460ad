"""Jobs in the words of other software: written for it, and read from its flags and logs."""
