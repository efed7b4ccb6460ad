"""The rules of a legal layout, a file a subject; each is a generator of Checks over a job."""
