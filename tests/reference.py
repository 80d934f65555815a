"""The losses in plain NumPy: float64, loops, one equation at a time.

They are written from the papers. In place of masks, a sequence is split into the segments of its
episodes, and each segment is computed alone, with its own bootstrap value.
"""

import math

import numpy as np


def random_ends(rng, steps, carried=False, ends_last=False, probability=0.25):
  """Draws ends of episodes of one environment.

  Args:
    rng: NumPy's generator.
    steps: number of rows.
    carried: whether an episode ended just before the first row, so that this row is a reset.
    ends_last: whether an episode must end with the last row, if it is valid.
    probability: of an end in any other row.

  Returns:
    terminated, truncated and valid, each [steps].
  """
  terminated, truncated, valid = (np.zeros(steps, bool) for _ in range(3))
  ended = carried
  for t in range(steps):
    valid[t] = not ended
    ended = False
    last = t == steps - 1 and ends_last
    if valid[t] and (last or rng.random() < probability):
      terminated[t], truncated[t] = [(True, False), (False, True), (True, True)][rng.choice(
          3, p=[0.45, 0.45, 0.1])]
      ended = True
  return terminated, truncated, valid


def segments(terminated, truncated, valid):
  """Returns a list of (first, stop, terminal), one for each segment of an episode.

  Rows first to stop - 1 belong to the episode, and obs[stop] follows them. If terminal, that
  observation has the value 0.
  """
  result = []
  first = None
  for t in range(len(valid)):
    if not valid[t]:
      assert first is None, 'an invalid row in the middle of an episode'
      continue
    first = t if first is None else first
    if terminated[t] or truncated[t] or t == len(valid) - 1:
      result.append((first, t + 1, bool(terminated[t])))
      first = None
  return result


def segment_values(value, first, stop, terminal):
  """Returns V of the segment's observations and of the one after them, which is 0 if terminal."""
  return [float(v) for v in value[first:stop]] + [0.0 if terminal else float(value[stop])]


def log_softmax(logits):
  shifted = np.asarray(logits, np.float64) - np.max(logits)
  return shifted - math.log(sum(math.exp(x) for x in shifted))


def entropy(logits):
  return -sum(math.exp(x) * x for x in log_softmax(logits))


def ratios(logits, action, behaviour_log_prob):
  """Returns pi(a) / mu(a) of every row."""
  return np.array([math.exp(log_softmax(logits[t])[action[t]] - behaviour_log_prob[t])
                   for t in range(len(action))])


def vtrace(value, reward, ratio, discount, ends, lambda_=1.0, clip_rho=1.0, clip_pg_rho=1.0):
  """V-trace targets and policy gradient advantages [T]; NaN in invalid rows.

  1802.01561: the targets are equation 1, with c_i = lambda min(1, ratio) of remark 2. The
  advantage is section 4.2's min(clip, ratio) (r + gamma v_{s+1} - V(s)). The paper does not say how
  lambda < 1 changes the advantage. Here v_{s+1} becomes lambda v_{s+1} + (1 - lambda) V(s+1), so
  that the on-policy advantage is the generalised advantage estimate.
  """
  targets = np.full(len(reward), np.nan)
  advantages = np.full(len(reward), np.nan)
  for first, stop, terminal in segments(*ends):
    v = segment_values(value, first, stop, terminal)
    r = reward[first:stop]
    w = ratio[first:stop]
    n = stop - first
    delta = [min(clip_rho, w[t]) * (r[t] + discount * v[t + 1] - v[t]) for t in range(n)]
    c = [lambda_ * min(1.0, w[i]) for i in range(n)]
    target = [
        v[s] + sum(discount ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, n))
        for s in range(n)] + [v[n]]
    for s in range(n):
      following = lambda_ * target[s + 1] + (1 - lambda_) * v[s + 1]
      targets[first + s] = target[s]
      advantages[first + s] = min(clip_pg_rho, w[s]) * (r[s] + discount * following - v[s])
  return targets, advantages


def impala_objective(logits, value, action, targets, advantages, valid, baseline_coef,
                     entropy_coef):
  """Returns the loss and its terms for constant targets and advantages (1802.01561, 4.2)."""
  rows = [t for t in range(len(action)) if valid[t]]
  policy = -sum(log_softmax(logits[t])[action[t]] * advantages[t] for t in rows)
  baseline = sum(0.5 * (targets[t] - value[t]) ** 2 for t in rows)
  bonus = sum(entropy(logits[t]) for t in rows)
  loss = policy + baseline_coef * baseline - entropy_coef * bonus
  return loss, {'policy_loss': policy, 'baseline_loss': baseline, 'entropy': bonus}


def gae(value, reward, discount, gae_lambda, ends):
  """1506.02438, equation 16: the sum of (gamma lambda)^l delta_{t+l}; NaN in invalid rows."""
  advantage = np.full(len(reward), np.nan)
  for first, stop, terminal in segments(*ends):
    v = segment_values(value, first, stop, terminal)
    r = reward[first:stop]
    n = stop - first
    for t in range(n):
      advantage[first + t] = sum(
          (discount * gae_lambda) ** (u - t) * (r[u] + discount * v[u + 1] - v[u])
          for u in range(t, n))
  return advantage


def returns(value, reward, discount, ends):
  """Returns discounted rewards to the end of the segment plus the discounted value there."""
  out = np.full(len(reward), np.nan)
  for first, stop, terminal in segments(*ends):
    for s in range(first, stop):
      out[s] = sum(discount ** (t - s) * reward[t] for t in range(s, stop))
      out[s] += 0.0 if terminal else discount ** (stop - s) * value[stop]
  return out


def ppo_objective(logits, value, action, behaviour_log_prob, behaviour_value, advantage,
                  value_target, valid, clip, clip_value, value_coef, entropy_coef,
                  clip_smoothly=False):
  """1707.06347, equations 7 and 9 over valid rows, as a loss, with half the squared error."""
  terms = dict.fromkeys(('policy_loss', 'value_loss', 'entropy', 'approx_kl', 'clip_fraction'), 0.0)
  for n in range(len(action)):
    if not valid[n]:
      continue
    log_ratio = log_softmax(logits[n])[action[n]] - behaviour_log_prob[n]
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    if clip_smoothly:
      clipped = 1 - clip + 2 * clip / (1 + math.exp(2 - 4 * (ratio - 1 + clip) / (2 * clip)))
    terms['policy_loss'] -= min(ratio * advantage[n], clipped * advantage[n])
    error = (value[n] - value_target[n]) ** 2
    if clip_value:
      change = min(max(value[n] - behaviour_value[n], -clip), clip)
      error = max(error, (behaviour_value[n] + change - value_target[n]) ** 2)
    terms['value_loss'] += 0.5 * error
    terms['entropy'] += entropy(logits[n])
    terms['approx_kl'] += ratio - 1 - log_ratio
    terms['clip_fraction'] += abs(ratio - 1) > clip
  loss = (terms['policy_loss'] + value_coef * terms['value_loss']
          - entropy_coef * terms['entropy'])
  return loss, terms


def numeric_gradient(function, x, step=1e-6):
  """Returns central differences of a scalar function, for each number of x."""
  x = np.array(x, np.float64)
  gradient = np.zeros_like(x)
  for place in np.ndindex(x.shape):
    original = x[place]
    x[place] = original + step
    above = function(x)
    x[place] = original - step
    below = function(x)
    x[place] = original
    gradient[place] = (above - below) / (2 * step)
  return gradient
