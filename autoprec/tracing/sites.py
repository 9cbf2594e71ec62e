"""Numbers of call sites, which ops are named by."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["SiteRegister", "SitesOf"]

#: Module, kind, and its sites in the order of their numbers: (source, with a digest of it, and line; occurrence).
SitesOf = tuple[str, str, tuple[tuple[str, int], ...]]


class SiteRegister:
    """Numbers the call sites of each (module, kind) in the order in which they are first seen.

    A site is a source line and its occurrence in the graph, so that train and eval graphs, recompiled graphs and the
    pieces left by graph breaks agree on an op's id. A run that goes on begins with the sites that it knew, whichever
    branch runs first. Where the source is another by now, a line that it was cannot be told from one that is new: its
    sites take the numbers that are free again, in the order in which they are first seen.
    """

    def __init__(self, known: Iterable[SitesOf] = ()) -> None:
        self._before = tuple(known)
        self._settled = False
        self._begin()

    def _begin(self) -> None:
        self._sites = {(fqn, kind): list(sites) for fqn, kind, sites in self._before}
        #: Numbers of sites that were not seen again yet, and the sources that these were in.
        self._waiting = {key: {*range(len(sites))} for key, sites in self._sites.items()}
        self._sources = {key: {_source(frame) for frame, _ in sites} for key, sites in self._sites.items()}

    def settle(self) -> bool:
        """A training graph is about to be numbered. True for the first: numbers begin anew then, in the order of the
        training graphs, also where an evaluation came first."""
        if self._settled:
            return False
        self._settled = True
        self._begin()
        return True

    def number(self, fqn: str, kind: str, frame: str, occurrence: int) -> int:
        """Place of a site among those of its kind in its module."""
        key, site = (fqn, kind), (frame, occurrence)
        sites = self._sites.setdefault(key, [])
        waiting = self._waiting.get(key)
        if site not in sites and waiting and _source(frame) not in self._sources[key]:
            sites[min(waiting)] = site
        if site not in sites:
            sites.append(site)
        place = sites.index(site)
        if waiting:
            waiting.discard(place)
        return place

    @property
    def known(self) -> tuple[SitesOf, ...]:
        """For the register of a run that goes on."""
        if not self._settled:
            return self._before
        return tuple((fqn, kind, tuple(sites)) for (fqn, kind), sites in self._sites.items())


def _source(frame: str) -> str:
    return frame.rpartition(":")[0]
