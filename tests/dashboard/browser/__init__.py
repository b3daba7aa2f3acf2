"""The pages in a real browser, over a real coordinator with a real job on emulated devices."""
