"""Values as stored bytes, and back: what cannot come back equal is never stored."""
