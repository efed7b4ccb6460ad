"""One step of one rank of any world on fake tensors: does it fit, does it send what was planned?"""
