"""How values become bytes and text that another process, another release or a terminal reads."""
