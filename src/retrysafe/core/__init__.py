"""The rules of retrysafe, without I/O: standard library only, no clock, no thread, no loop."""
