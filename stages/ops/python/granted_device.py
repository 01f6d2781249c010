"""The device that the engine gave a stage, for stages that measure."""

import cuda_agent_stage as stage


def device_type(program: stage.Program) -> str:
    """`cpu` or `cuda`: what the engine files the results under, which the parameter must not contradict."""
    declared, wanted = program.device["type"], program.params["device"]
    if wanted not in ("auto", declared):
        hint = "give the stage `resources: { gpu: 1 }`" if wanted == "cuda" else "take `gpu` off its resources"
        raise stage.StageError(
            f"the parameter device is {wanted}, but the stage was given a device of type {declared}",
            kind="device",
            hint=hint,
        )
    return declared
