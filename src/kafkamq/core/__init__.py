"""Pure rules: state machines that know no clock, thread, socket or logger."""
