"""Task sets and graders."""
