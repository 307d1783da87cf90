"""Steps: what an operation has finished is remembered, and a later attempt skips it."""
