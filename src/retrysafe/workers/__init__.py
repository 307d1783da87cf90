"""Workers: abandoned operations are finished or reported, and stores are swept."""
