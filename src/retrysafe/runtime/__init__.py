"""The faces of the engine: threads and asyncio, with what keeps a running operation alive."""
