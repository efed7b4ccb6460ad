"""Pure functions from a job to what it will send, hold and take; results name their parts."""
