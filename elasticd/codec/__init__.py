"""Values as bytes and text that another process, another release or a terminal reads."""
