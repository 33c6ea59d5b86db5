"""Which tensor is noted as what."""

from stepscope.recording.backward_ranges import SequenceNotes
from stepscope.recording.memory_history import TensorNotes
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini
from tests.recording.test_memory_capture import CPU


def test_an_activation_is_saved_where_a_freed_gradient_lay():
    """A loop frees gradients after a step has ended, and the next forward is given their addresses."""
    step = TrainingStep(mini(), CPU)
    parameter = next(step.model.parameters())
    parameter.grad = parameter.detach().clone()
    notes = TensorNotes(step, CPU)
    notes.resident()
    place, parameter.grad = parameter.grad, None
    step.loss = (place * parameter).sum()
    notes.saved(SequenceNotes(()))
    at_place = [note.category for note in notes.notes if note.address == place.untyped_storage().data_ptr()]
    assert at_place == ["gradients", "saved for backward"]
    at_parameter = [note.category for note in notes.notes if note.address == parameter.untyped_storage().data_ptr()]
    assert at_parameter == ["parameters"], "what is resident when forward ends is no activation"
