"""Measurements beside the step times: sequence lengths, probes of idle devices, probes of all-reduce."""
