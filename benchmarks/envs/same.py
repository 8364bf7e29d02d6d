"""Run the library's PPO as the others have theirs, for `benchmarks/envs`.

Gradients of actor and critic are clipped by one norm, and advantages normalised per minibatch.
"""

from benchmarks.envs.ours import main

if __name__ == "__main__":
    main(clip_jointly=True, normalize_minibatches=True)
