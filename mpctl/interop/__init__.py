"""Plans in the words of other software: a job as its flags, file or snippet, and read from them."""
