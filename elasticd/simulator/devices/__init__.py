"""The model of the devices and links: what a step and a transfer take."""
