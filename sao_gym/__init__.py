"""sao-gym: multi-turn agent environments as token streams, and an asynchronous SAO trainer that learns from them.

Importing this package tells Gymnasium the names of the built-in environments, and imports none of them.

Example:
    import gymnasium, sao_gym
    env = gymnasium.make("sao_gym/Arithmetic-v0")
"""

import gymnasium

__version__ = "0.1.0"

gymnasium.register(id="sao_gym/Arithmetic-v0", entry_point="sao_gym.registry:make", kwargs={"name": "arithmetic"})
gymnasium.register(id="sao_gym/PythonMath-v0", entry_point="sao_gym.registry:make", kwargs={"name": "python_math"})
gymnasium.register(id="sao_gym/SweVerified-v0", entry_point="sao_gym.registry:make", kwargs={"name": "swe_verified"})
gymnasium.register(id="sao_gym/Terminal-v0", entry_point="sao_gym.registry:make", kwargs={"name": "terminal"})
gymnasium.register(id="sao_gym/WritingStyle-v0", entry_point="sao_gym.registry:make", kwargs={"name": "writing_style"})
