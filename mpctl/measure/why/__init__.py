"""Why a run takes as long as it does: its log or records against its plan."""
