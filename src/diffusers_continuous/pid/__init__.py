"""The Pixel Diffusion Decoder (PiD): a latent, its noise level and a caption become a picture 4 or 8 times larger.

    tables -> layers, adapter -> modeling      the network
    memory                                     what a decode needs, in bytes, and how to make it need less
    scheduling                                 the few-step rule of the students, the solver of the teachers
    checkpoints -> conversion                  which official files exist, and how to read one

Knows nothing of requests, engines and pipelines of other models.
"""
