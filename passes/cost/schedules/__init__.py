"""Pipeline schedules: which rank holds which stage, the order of every rank's actions, and the time that they take.

The orders are those that the classes of `torch.distributed.pipelining` run. `timeline` simulates them.
"""

from passes.cost.schedules.actions import Action, ActionGraph, Held, action_graph, held_together, in_flight
from passes.cost.schedules.kinds import SCHEDULES, ScheduleKind, check_schedule, messages_held, rank_of_stage
from passes.cost.schedules.messages import Message, arrivals
from passes.cost.schedules.orders import schedule_actions
from passes.cost.schedules.timeline import StageSeconds, Timeline, simulate, step_bound

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionGraph",
    "Held",
    "Message",
    "ScheduleKind",
    "StageSeconds",
    "Timeline",
    "action_graph",
    "arrivals",
    "check_schedule",
    "held_together",
    "in_flight",
    "messages_held",
    "rank_of_stage",
    "schedule_actions",
    "simulate",
    "step_bound",
]
