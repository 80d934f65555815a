"""All metrics: what each means, its unit, what is unusual, and its name in TensorBoard.

`podracer_jit metrics` prints the table. The first name is that of metrics.jsonl or
evaluations.jsonl, the second that of TensorBoard and of trackers.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
  """A metric of an update or of an evaluation."""

  name: str  # in metrics.jsonl or evaluations.jsonl
  shown: str  # in TensorBoard and trackers: group/name; '' if it is an axis or a text
  meaning: str
  unit: str  # '' for a number without one
  unusual: str  # values to look at, and what they may mean; '' if none is


def _by_name(*metrics: Metric) -> dict[str, Metric]:
  return {metric.name: metric for metric in metrics}


_AXES = (
    Metric('update', '', 'updates of the learner so far', 'updates', ''),
    Metric('steps', '', 'valid agent steps learned from so far; the axis in TensorBoard and '
           'trackers', 'agent steps', ''))

# Of an update, whatever learns.
_RUN = _by_name(
    *_AXES,
    Metric('frames', 'charts/frames', 'frames of simulators: steps times the frame skip', 'frames',
           ''),
    Metric('sps', 'charts/SPS', 'valid steps a second, over the updates of the last 10 seconds; '
           'the first update of a command or a segment counts alone, as it may include compilation',
           'steps/s', 'falls: the machine is shared, or episodes or evaluations became slower; '
           '`python -m benchmarks.parts` measures each part'),
    Metric('elapsed_s', 'time/elapsed_s', 'time of training, over all commands: with saves and the '
           "compilation of the learner's program, without the start of environments and their "
           'replay', 's', ''),
    Metric('wall_s', 'time/wall_s', 'all time since the command began, with imports, compilation, '
           'replays, saves and pauses; a command that resumes the run adds to that of its '
           'checkpoint', 's', 'far above time/elapsed_s: most time goes into starts'),
    Metric('memory_mb', 'charts/memory_MB', 'memory that the process occupies; the processes of '
           'Gymnasium tasks are not counted', 'MB', 'grows without end: something leaks'),
    Metric('device_memory_mb', 'charts/device_memory_MB', 'most memory that has been in use on a '
           'GPU or TPU of the process; absent on CPUs', 'MB', 'near the memory of the device: '
           'the next larger setting will not fit'),
    Metric('episode_return', 'charts/episodic_return', 'mean return of the last `log.window` '
           'episodes of training, with unclipped rewards; null before the first has ended',
           'reward', 'flat for long: nothing is learned, or rewards are rare'),
    Metric('episode_length', 'charts/episodic_length', 'mean length of these episodes',
           'agent steps', 'equal to the time limit: all episodes are truncated'),
    Metric('greediest_return', 'charts/greediest_return', 'mean return of the environments that '
           'explore least, with unclipped rewards: their newest 10 episodes, or their share of '
           '`log.window` if it is more; absent if all environments explore alike (DQN and R2D2: '
           'the smallest probability of a random action)', 'reward', 'near '
           'charts/episodic_return: the others explore hardly more; far below it: greedy actions '
           'are worse than random ones'),
    Metric('episodes', 'charts/episodes', 'episodes that have ended so far', 'episodes',
           'stays 0: episodes are longer than a segment (`env.renew_every_updates`)'),
    Metric('actor_wait_s', 'time/actor_wait_s', 'time that an actor waited for the learner in the '
           'update', 's', 'most of an update: the learner is the bottleneck'),
    Metric('learner_wait_s', 'time/learner_wait_s', 'time that the learner waited for actors in '
           'the update', 's', 'most of an update: the actors are the bottleneck'),
    Metric('eval_wait_s', 'time/eval_wait_s', 'time that training waited for an evaluation since '
           'the line before', 's', 'above 0: evaluations take longer than the time between '
           'them; let them be rarer or shorter (`eval`)'),
    Metric('cgd', 'charts/CGD', 'collection-to-gradient delay (2007.02622): how many gradient '
           'steps the policy is older than the gradient', 'gradient steps', 'grows: actors fall '
           'behind; of a replay it is mostly the age of what is drawn'),
    Metric('gud', 'charts/GUD', 'gradient-to-update delay: how many gradient steps were taken '
           'between a gradient and its use', 'gradient steps', 'above 0 only in schemes with '
           'several workers of gradients'),
    Metric('learning_rate', 'charts/learning_rate',
           "learning rate of the update's last gradient step", '',
           '0 before the end: the schedule or `optimizer.kl_target` has stopped the training'),
    Metric('grad_norm', 'losses/grad_norm', 'norm of the gradient before clipping, mean over '
           'gradient steps', '', 'exactly 0: nothing is learned; always far above '
           '`optimizer.max_grad_norm`: each step is clipped'),
    Metric('param_norm', 'losses/param_norm', 'norm of the parameters, without running moments',
           '', 'grows without end: the training diverges, or lacks weight decay'),
    Metric('warning', '', 'a line if updates in a row changed nothing', 'text', 'present'))

# Of an update, if an option is a schedule; OPTION stands for its name.
_SCHEDULES = _by_name(
    Metric('loss.OPTION', 'charts/loss.OPTION', 'value of an option of the algorithm that is a '
           'schedule, such as loss.entropy_coef', "the option's", ''),
    Metric('optimizer.OPTION', 'charts/optimizer.OPTION', 'value of an option of the optimizer '
           'that is a schedule', "the option's", ''))

# Of an update that learns from a replay.
_REPLAY = _by_name(
    Metric('sampled', 'replay/sampled', 'items drawn in the update', 'items',
           '0: the replay has not yet `replay.min_size` items'),
    Metric('samples_per_s', 'replay/samples_per_s', 'items drawn a second, over the last 10 '
           'seconds of training', 'items/s', ''),
    Metric('sampled_age', 'replay/sampled_age', 'mean time since the drawn items were added',
           'gradient steps', 'far above that of half a replay: new items are rarely drawn'),
    Metric('replay_size', 'replay/size', 'items in the replay, each copy counted', 'items', ''),
    Metric('replay_ratio', 'replay/ratio', 'items drawn for each that was added, since the start',
           '', 'other than `replay.samples_per_insert`, if that is set, by more than its '
           'tolerance'),
    Metric('gradient_steps', 'charts/gradient_steps', 'gradient steps so far', 'gradient steps',
           ''))

# Of an update with `placement.cluster`.
_CLUSTER = _by_name(
    Metric('actors_alive', 'cluster/actors_alive', 'processes of actors that work', 'processes',
           'below their number in the config: some have died or find no place'),
    Metric('actors_pending', 'cluster/actors_pending', 'processes of actors that are being '
           'started', 'processes', 'above 0 for long: the cluster has no cores for them'),
    Metric('actor_restarts', 'cluster/actor_restarts', 'processes of actors that were begun again '
           'so far', 'processes', 'grows: machines or environments fail'),
    Metric('cluster_mb_per_s', 'cluster/mb_per_s', 'data received from actors', 'MB/s',
           'near the speed of the network: send less, for example with fewer environments a '
           'machine'),
    Metric('cluster_get_ms', 'cluster/get_ms', 'time to get one rollout or gradient', 'ms', ''))

# Terms of the losses of shipped algorithms: means over the valid rows, or drawn items, of all
# gradient steps of an update.
TERMS = _by_name(
    Metric('policy_loss', 'losses/policy_loss', 'loss of the policy (PPO, IMPALA)', '',
           'its size says little: the parameters at which it is 0 change with each update'),
    Metric('value_loss', 'losses/value_loss', 'half the squared error of the critic (PPO); '
           'with `normalise.value`, in deviations of values', 'reward^2',
           'grows for long while returns do not: the critic does not keep up'),
    Metric('baseline_loss', 'losses/value_loss', 'half the squared V-trace error of the critic '
           '(IMPALA)', 'reward^2', 'as value_loss'),
    Metric('entropy', 'losses/entropy', 'entropy of the policy (SAC: estimated by one action)',
           'nats', 'near its minimum early: the policy does not explore any more, so raise '
           '`loss.entropy_coef`; equal to that of a uniform policy for long: nothing is learned'),
    Metric('approx_kl', 'losses/approx_kl', 'KL divergence from the policy that acted to the '
           "trained one, Schulman's estimate k3 (PPO)", 'nats', 'above 0.05: steps are too '
           'large; lower the learning rate or the number of epochs'),
    Metric('clip_fraction', 'losses/clip_fraction', 'share of rows whose ratio of probabilities '
           'is outside of `loss.clip` (PPO)', '', 'above 0.4: steps are too large; 0: they may '
           'be too small'),
    Metric('explained_variance', 'losses/explained_variance', 'share of the variance of the value '
           'targets that the critic explains: 1 - Var(target - value) / Var(target) (PPO, '
           'IMPALA)', '', 'at most 1; near or below 0 for long: the critic predicts no better '
           'than a constant'),
    Metric('rho', 'losses/rho', 'mean importance weight of the trained policy against the acting '
           'one (IMPALA)', '', 'far from 1: the policies differ much, because of lag or large '
           'steps'),
    Metric('loss', 'losses/loss', 'half the squared TD error (DQN, DPG, R2D2, PQN), weighted by '
           'importance with a replay; rescaled if the algorithm rescales values', 'reward^2',
           'grows without end: the values diverge'),
    Metric('abs_td_error', 'losses/abs_td_error', 'mean |TD error| (DQN, DPG, R2D2, PQN); '
           'rescaled if the algorithm rescales values', 'reward',
           'grows without end: the values diverge'),
    Metric('q', 'losses/q_values', 'mean action value of the drawn items, or of what '
           'the policy would do there', 'reward',
           'above any return that is possible: values are overestimated'),
    Metric('importance_weight', 'replay/importance_weight', 'mean importance weight of the drawn '
           'items (1511.05952)', '', 'near 0: few items have nearly all of the priority'),
    Metric('critic_loss', 'losses/critic_loss', 'half the squared TD error, summed over critics '
           '(SAC, TD3)', 'reward^2', 'grows without end: the values diverge'),
    Metric('actor_loss', 'losses/actor_loss', 'the actor minimises it: minus the value of its '
           "action and alpha times the policy's entropy (SAC)", 'reward',
           'far below minus any return that is possible: values are overestimated'),
    Metric('alpha', 'losses/alpha', 'temperature: weight of the entropy (SAC)', 'reward/nat',
           'grows without end: the target entropy cannot be reached'),
    Metric('alpha_loss', 'losses/alpha_loss', 'loss of the temperature (SAC); its gradient is what '
           'matters', 'reward', ''))

UPDATES: dict[str, Metric] = _RUN | _SCHEDULES | _REPLAY | _CLUSTER | TERMS

EVALUATIONS: dict[str, Metric] = _by_name(
    *_AXES,
    Metric('num_episodes', 'eval/num_episodes', 'whole episodes of the evaluation', 'episodes',
           ''),
    Metric('seconds', 'time/eval_s', 'duration of the evaluation', 's', ''),
    Metric('mean', 'eval/episodic_return', 'mean return of the episodes, with unclipped rewards',
           'reward', 'far from charts/episodic_return: exploration, or `eval.greedy`, matters'),
    Metric('standard_error', 'eval/standard_error', 'standard error of that mean', 'reward',
           'as large as the differences between evaluations: play more episodes'),
    Metric('min', 'eval/min', 'least return of an episode', 'reward', ''),
    Metric('median', 'eval/median', 'median of the returns', 'reward', ''),
    Metric('max', 'eval/max', 'highest return of an episode', 'reward', ''),
    Metric('mean_length', 'eval/episodic_length', 'mean length of the episodes', 'agent steps',
           ''),
    Metric('human_normalised', 'eval/human_normalised', 'mean of (return - random) / (human - '
           'random), of Atari games (1507.04296)', '', ''),
    Metric('video', 'eval/video', 'video of a further episode, relative to the workdir '
           '(`eval.video_every`)', 'path', ''),
    Metric('error', '', 'a line about why there is no mean', 'text', 'present'))

TABLE: dict[str, Metric] = UPDATES | EVALUATIONS


def shown(name: str) -> str:
  """Returns what TensorBoard and trackers call a metric of an update; '' if they do not show it.

  Args:
    name: in metrics.jsonl. A term of a user's own algorithm is in the group `losses`.
  """
  metric = UPDATES.get(name)
  if metric:
    return metric.shown
  return f'{"charts" if name.startswith(("loss.", "optimizer.")) else "losses"}/{name}'
