"""Feedback from outside: an application is served by the policy in training, and says later how good an answer was.

Example:
    desk = Desk(gateway, book, clock=clock, sampling=sampling, budgets=budgets, deadline_s=600)
    async with serving(desk, key="...", port=8300) as address:
        trajectory = await desk.episode(episode, on_version=print, on_answered=print)
"""

from sao_gym.feedback.app import serving
from sao_gym.feedback.book import FeedbackBook, Keep, ServedEpisode, ServedState
from sao_gym.feedback.desk import Desk

__all__ = ["Desk", "FeedbackBook", "Keep", "ServedEpisode", "ServedState", "serving"]
