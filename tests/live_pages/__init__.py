"""Training loops that people have, cut to a page each: plain, and kept alive by `elasticd.live`."""
