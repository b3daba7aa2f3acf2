"""`elasticd-agent`: the entry point of the command that runs a node's agent."""

from __future__ import annotations

from elasticd.extras import entered


def main() -> None:
    """Runs the command. A package that is missing is named with the extra that brings it."""

    def start() -> None:
        from elasticd_agent.command import command

        command(prog_name="elasticd-agent")

    entered("elasticd-agent", start)


if __name__ == "__main__":
    main()
