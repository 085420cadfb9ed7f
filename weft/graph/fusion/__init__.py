"""JIT fusion: element-wise parts of a graph as regions, each compiled as one function."""

from weft.graph.fusion.fuse import fuse, regions_of, unfuse
from weft.graph.fusion.inductor import CompiledRegion, compile_region
from weft.graph.fusion.region import Region, region_of

__all__ = ["CompiledRegion", "Region", "compile_region", "fuse", "region_of", "regions_of", "unfuse"]
