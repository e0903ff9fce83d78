"""What every test shares: hypothesis without a deadline, because a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("dfo", deadline=None)
settings.load_profile("dfo")
