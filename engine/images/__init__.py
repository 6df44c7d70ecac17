"""Images as clients send them to what an encoder reads: decoded within limits, resized, cropped, normalised."""
