"""A small transformer trained on real text once in each precision, and how the runs depart from fp32."""
