"""What developers run: `python -m ggjit.dev COMMAND`.

check [PART ...]       format, lint, types, tests and a wheel: all that CI runs on one Python and CPU level
reference PATH ...     run reference cases through builder, plan and compiled program
"""
