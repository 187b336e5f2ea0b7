"""Defines the checker's rules: id, severity, harm and remedy of each.

Guarantees: ids are stable between versions; each text can be understood without other documentation.
"""

from dataclasses import dataclass

from agentrl.envkit.check.findings import Level

ERROR, WARNING, HINT = Level.ERROR, Level.WARNING, Level.HINT


@dataclass(frozen=True)
class Rule:
    """A rule of the checker.

    Attributes:
        level: Severity of its findings.
        why: Harm of a breach to training.
        mend: Remedy.
    """

    level: Level
    why: str
    mend: str


RULES: dict[str, Rule] = {
    "construct": Rule(
        ERROR,
        "A run makes one environment for each episode, so no episode can start.",
        "Make the constructor work with the given key=value settings and defaults for the rest.",
    ),
    "signature": Rule(
        ERROR,
        "The rollout calls reset(seed=..., options=...), step(action) and close(), and awaits each.",
        "Write async def reset(self, *, seed=None, options=None), async def step(self, action), async def close(self).",
    ),
    "spaces": Rule(
        ERROR,
        "Gymnasium's tools, and this checker, read the spaces to know the valid actions and observations.",
        "Set observation_space and action_space to gymnasium spaces, or subclass LanguageEnvironment.",
    ),
    "tool-description": Rule(
        HINT,
        "The model knows a tool only by its docstring: without one it has to guess.",
        "Give the method a docstring: one line that says what it does, and an Args: section.",
    ),
    "tool-broken": Rule(
        WARNING,
        "The model gets the error as the tool's answer and learns not to call it; it is reported nowhere else.",
        "Mend the method: it fails on arguments that fit its type hints.",
    ),
    "dataset": Rule(
        ERROR,
        "Tasks that cannot be read end the run before its first episode.",
        "Mend the class's dataset line, or give one task with --task '{...}'.",
    ),
    "no-task": Rule(
        ERROR,
        "reset needs a task, but the class has no dataset and no task was given.",
        "Give the class a dataset, or the checker one task: --task '{\"question\": ...}'.",
    ),
    "raises": Rule(
        ERROR,
        "The episode fails and its tokens are lost; failures that depend on the action also bias the batch.",
        "Handle the case; a wrong action of the model is an observation or a low reward, never an exception.",
    ),
    "hang": Rule(
        ERROR,
        "An episode that never returns occupies its place until the run's time limit ends it.",
        "Bound every await: async with asyncio.timeout(seconds). Run blocking code (time.sleep, long computing) in "
        "a thread or process with a limit: agentrl.host.worker_pool, or blocking = True on the class.",
    ),
    "return": Rule(
        ERROR,
        "The rollout unpacks (observation, info) and (observation, reward, terminated, truncated, info).",
        "Return Gymnasium's tuples: reset's 2 values, step's 5, with terminated and truncated as bools.",
    ),
    "info": Rule(
        ERROR,
        "info['metrics'] is logged as numbers: any other value fails the episode.",
        "Return a dict; put only numbers into info['metrics'], and other values under other keys of info.",
    ),
    "observation-space": Rule(
        ERROR,
        "A chat API or a wrapper refuses or misreads an observation outside the space.",
        "Return elements of the space; messages are dicts with a role and a text as content.",
    ),
    "reward-type": Rule(
        ERROR,
        "A reward that is not a finite number fails the episode; one NaN would turn all weights into NaN.",
        "Return a finite float, e.g. float(answer == right), or None if the reward is missing; await async calls.",
    ),
    "reward-range": Rule(
        ERROR,
        "Metrics and reward scaling rely on the declared range.",
        "Clip the reward, or declare the true reward_range.",
    ),
    "empty-observation": Rule(
        WARNING,
        "The model is asked to continue without a new message: two answers follow each other.",
        "Return at least one message from reset, and from each step that does not end the episode.",
    ),
    "held-out": Rule(
        WARNING,
        "Recipes evaluate on the split test, which is missing: the run ends before its first step.",
        "Give more tasks (every fifth is held out), or dataset = {'train': [...], 'test': [...]}.",
    ),
    "reward-missing": Rule(
        WARNING,
        "An episode without a reward is counted but not trained on.",
        "Return a number on every path of reward, judge or step; use None only if judging failed.",
    ),
    "equal-rewards": Rule(
        HINT,
        "A group whose rewards are all equal has zero advantage: nothing is learned from it.",
        "Check that a right answer earns more than a wrong one; if all sampled actions are wrong, this is fine.",
    ),
    "odd-action": Rule(
        ERROR,
        "Models do write this. The exception fails the episode, so the model never learns that it was wrong.",
        "Answer it with an observation or a low reward; read content as action.get('content') or ''.",
    ),
    "options-mutated": Rule(
        ERROR,
        "The task is shared by all episodes of its group and by later epochs: they get the changed task.",
        "Copy before writing: task = dict(options), or copy.deepcopy(options) for nested values.",
    ),
    "action-mutated": Rule(
        ERROR,
        "The action is part of the agent's conversation: the next prompt no longer holds what was generated.",
        "Copy the message before changing it.",
    ),
    "observation-reused": Rule(
        ERROR,
        "The trajectory and the next prompt keep the observation, and would contain the changed one.",
        "Return a new object each time: list(self.messages), array.copy().",
    ),
    "same-seed": Rule(
        ERROR,
        "An episode cannot be repeated, neither to debug it nor to compare two policies on it.",
        "Draw all randomness from self.np_random, which choose_task(seed, options) seeds; sort sets; keep state on "
        "self, set in reset, never on the class or in globals.",
    ),
    "different-seeds": Rule(
        HINT,
        "All episodes start alike: the model sees the same task every time.",
        "Use the seed: self.choose_task(seed, options), or self.np_random after it.",
    ),
    "reset-after-done": Rule(
        ERROR,
        "State of the last episode leaks into the next one.",
        "Set every attribute of the episode in reset, not in the constructor or the class.",
    ),
    "reset-mid-episode": Rule(
        ERROR,
        "An episode that is given up (truncated by the run) leaves the environment unusable.",
        "Let reset start a new episode in any state.",
    ),
    "step-after-done": Rule(
        WARNING,
        "A step after the end gives a reward that belongs to no episode, and hides the caller's mistake.",
        "Raise RuntimeError in step when no episode is running.",
    ),
    "step-before-reset": Rule(
        WARNING,
        "A step without an episode hides the caller's mistake.",
        "Raise RuntimeError in step when no episode is running.",
    ),
    "blocks-loop": Rule(
        WARNING,
        "All episodes of a process share one event loop: while this line runs, every other episode waits.",
        "Await an async client, or move the call off the loop: await asyncio.to_thread(...), a process for computing.",
    ),
    "background-error": Rule(
        WARNING,
        "A background task failed, or an object was not closed, unnoticed: the episode goes on without it.",
        "Await the tasks you start, or use asyncio.TaskGroup; close clients in close.",
    ),
    "cancel-leak": Rule(
        ERROR,
        "Episodes are cancelled in every run (at their time limit and at its end): leaked resources add up.",
        "Use async with or try/finally around the await, and free everything in close.",
    ),
    "cancel-swallowed": Rule(
        WARNING,
        "A run cannot end such an episode, and waits for it without success.",
        "Catch Exception, not BaseException; after cleaning up in except asyncio.CancelledError, raise.",
    ),
    "close": Rule(
        ERROR,
        "close is called after each episode, failed and unstarted ones too, and may be called again.",
        "Make close work in any state: before reset, in mid-episode, and twice.",
    ),
    "close-leak": Rule(
        ERROR,
        "Leaked files, sockets, processes and memory add up over the episodes until the machine has none left.",
        "Free them in close: close files and writers, kill and wait for processes, cancel and await tasks.",
    ),
    "new-process": Rule(
        ERROR,
        "A run's controller is another process: it makes the environment from the path and settings in the recipe.",
        "Keep the class at a module's top level and the settings plain values; open resources in reset.",
    ),
    "shared-state": Rule(
        ERROR,
        "Many instances exist at the same time: one episode changes another's course or reward.",
        "Keep the episode's state on self, set in reset; no mutable class attributes, globals or global random.",
    ),
    "global-state": Rule(
        WARNING,
        "Environment variables and the working folder belong to the whole process: other episodes see them changed.",
        "Pass env= and cwd= to the subprocess instead.",
    ),
}
