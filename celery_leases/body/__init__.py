"""What a body writes through self.lease: effects, progress, its own transaction."""
