"""A model's profile from measurements: samples of one device, or the steps of a job."""
