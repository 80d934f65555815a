"""What a trained policy does: evaluations, agents, exports, videos."""
