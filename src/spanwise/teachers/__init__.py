"""What a teacher returns, and where it comes from: memory, disk, HTTP, another process."""
