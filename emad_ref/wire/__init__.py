"""Decoders in other processes: the methods of ``emad_ref.protocol`` over a byte stream, as docs/wire.md says them.

    points      operating points as JSON           address      where a decoder is: a program, a socket
    frames      a header and arrays as bytes       connection   one call after the other, each with a time limit
    messages    what stands in a frame             remote       the judge's side: Decoder and Session
    failure     the one way in which it breaks     serving      the decoder's side, for any factory

NumPy and the standard library only.
"""
