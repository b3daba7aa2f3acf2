"""`elasticd.live`: a script's own loop over DDP, FSDP2 or DTensor modules, kept alive as devices change."""
