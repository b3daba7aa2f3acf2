"""Telemetry of one rank: step times, communication times, the main thread's place, emulated devices."""
