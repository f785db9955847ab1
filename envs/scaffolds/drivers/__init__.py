"""Programs that run an agent in its own Python, outside of sao-gym: started by path, never imported by it."""
