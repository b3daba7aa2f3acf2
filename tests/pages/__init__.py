"""Pages as tests: their commands are run, and what tutorials show is compared with what is printed."""
