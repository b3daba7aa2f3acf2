"""Planning problems as files: the format, its conversion, and the plan written in it."""
