"""Ways for an agent to work in a sandbox: the tools, and how what they say is shown."""
