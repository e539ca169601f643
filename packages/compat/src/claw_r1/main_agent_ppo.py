"""`python3 -m claw_r1.main_agent_ppo KEY=VALUE …`: trains synchronously. Each group is trained by the version that sampled it."""

import sys

from claw_r1.async_main import main

if __name__ == "__main__":
    sys.exit(main(module="claw_r1.main_agent_ppo", is_async=False))
