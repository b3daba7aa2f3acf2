"""`elasticd check`: one step of a script's job under several layouts, compared with one process."""
